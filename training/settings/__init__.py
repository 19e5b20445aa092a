"""Settings of recipes: records with ranges, which import neither torch nor the decoder."""
