"""The experiments of the paper: one file for each table or figure, and what they share.

Every run writes a record (`records.py`): configuration, seeds, commit, machine, versions, times, metrics. Tables are
rendered from records alone. `regression_sets.py` is the experiment of tables 12 and 13; `stacked_training.py` and
`stacked_prediction.py` are its networks, `regression_tables.py` its tables.
"""
