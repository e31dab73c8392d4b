"""The commands of the laboratory: `bml plan`, `bml sim`, `bml figures`, `bml bench`."""

from __future__ import annotations

from bml.io.signals import signals_put_off
from bml.lab.flows.compilation import surround

surround(signals_put_off)
