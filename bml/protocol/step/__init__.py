"""One step of reduction on one server, pure: cuts and slices, the engines' dataflow, the commit barrier."""
