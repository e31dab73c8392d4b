"""The figures that there are: importing a module of figures registers them. One line for each."""

# ruff: noqa: F401

import bml.lab.figures.failures
import bml.lab.figures.fat_tree
import bml.lab.figures.hips
import bml.lab.figures.pauses
import bml.lab.figures.synchronisation
import bml.lab.figures.trainings
import bml.lab.figures.tree_shapes
