"""What folding and baking cost: formulas, measured points, and a fit of one to the other."""
