"""Show what other runs say beside this one: a comparison, a curve by hours, an oracle."""
