"""Many jobs from one file, each kept when it is done: bakes and folds, in one process or on Ray."""

from contextfold.sweep.engine import Outcome, sweep
from contextfold.sweep.jobs import Job, read_jobs
from contextfold.sweep.results import COLUMNS, check_parquet, write_parquet

__all__ = ["COLUMNS", "Job", "Outcome", "check_parquet", "read_jobs", "sweep", "write_parquet"]
