"""What explains a difference: changed definitions, weights, and the shares of all regions."""
