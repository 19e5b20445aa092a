"""The records of recipes: settings and their ranges, which import neither torch nor the decoder."""
