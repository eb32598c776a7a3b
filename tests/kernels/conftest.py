"""The folder's own helpers."""

import os
import pathlib
import sys

os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # workers of one test run compile side by side, none has a TPU
sys.path.insert(0, str(pathlib.Path(__file__).parent))
