"""Data sets: readers of usual layouts, splits, preparation of raw examples, downloads, image corruptions."""

from .arrays import from_arrays
from .columns import Column, Kind, parse_columns
from .contents import Contents
from .corrupted_folders import read_corrupted
from .corruptions import CORRUPTIONS, SEVERITIES, CorruptedSplit, corrupt
from .csv_file import csv_rows
from .dataset import Dataset
from .image_files import ImageFileSplit, decode_image, decode_images
from .limits import Limits
from .preparation import Augmentation, Preparation
from .reading import names_code, read
from .splits import ArraySplit, Split, Task

__all__ = [
    "CORRUPTIONS",
    "SEVERITIES",
    "ArraySplit",
    "Augmentation",
    "Column",
    "Contents",
    "CorruptedSplit",
    "Dataset",
    "ImageFileSplit",
    "Kind",
    "Limits",
    "Preparation",
    "Split",
    "Task",
    "corrupt",
    "csv_rows",
    "decode_image",
    "decode_images",
    "from_arrays",
    "names_code",
    "parse_columns",
    "read",
    "read_corrupted",
]
