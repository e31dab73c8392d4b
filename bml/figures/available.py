"""The figures that there are: importing a module of figures registers them. One line for each."""

# ruff: noqa: F401

import bml.figures.failures
import bml.figures.fat_tree
import bml.figures.hips
import bml.figures.pauses
import bml.figures.synchronisation
import bml.figures.trainings
import bml.figures.tree_shapes
