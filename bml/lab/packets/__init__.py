"""Steps packet by packet on a modelled network: queues, pause frames, marks and rate control. Pure."""
