import sys
from pathlib import Path

# The tests here, and the processes that they start, import the fake engine and network by their bare names.
sys.path.insert(0, str(Path(__file__).parent))
