"""The laboratory: what is asked of fabrics before a job, or beside peers. No job imports any of it.

Steps on modelled networks (`flows`, `packets`), surveys of failures, figures of papers, measurements beside
peers (`bench`), and their `commands`, which `bml.cli` loads by name.
"""
