"""Evaluate models by word errors on the held-out subset (paper 003 VII-D, VIII-C).

Statistics without a store and without Spark, also over folds and seeds that were measured apart:

- `training.evaluate.word_errors`: `read_errors`, `write_errors`; `of_models` renames models (a
  baseline with all transcripts becomes "oracle"), `joined` puts evaluations side by side.
- `training.evaluate.scores`: `SpeakerCounts.of(utterances)` pools them, `resample` draws
  speakers; `word_error_rate`, `reduction` and `recovery` of the draws have intervals; `compare`
  for the gain, its interval and the p-value.
"""
