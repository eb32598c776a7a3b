"""Lets the tests of this folder share `tiny` although pytest imports each file on its own."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent))
