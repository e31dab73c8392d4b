"""How long a step takes on a modelled network: flows that share links fairly, on a clock of their own."""
