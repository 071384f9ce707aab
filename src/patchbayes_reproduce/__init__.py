"""The experiments of the paper: one file for each table or figure, and what they share.

`experiment.py` says what an experiment is, `registry.py` lists them, `summary.py` renders the page of results. Tables 12 and
13: `regression_splits.py` (the data), `stacked_training.py` and `stacked_prediction.py` (all splits of a set as one model),
`regression_sets.py` (the runs), `regression_variants.py` (other readings of the protocol), `regression_comparison.py` (paired
tests), `regression_tables.py` (the tables), `regression_speed.py`.
"""
