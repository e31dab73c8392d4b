"""Trees packed into the rates of the NICs: within 1 % of the bound where these are one, else mostly."""
