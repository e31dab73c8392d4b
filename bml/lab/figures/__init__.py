"""The figures and tables of the papers, from theory or simulation, beside the published values. Pure."""
