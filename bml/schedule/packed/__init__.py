"""Trees packed into the rates of the NICs: the schedule within 1 % of the bound."""
