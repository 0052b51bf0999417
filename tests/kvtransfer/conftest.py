import sys
from pathlib import Path

# The fake engine and network are imported by tests here and by the processes that they start.
sys.path.insert(0, str(Path(__file__).parent))
