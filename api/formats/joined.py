"""What the API's core takes of this wing (`api/wings.py`)."""

from tandem.api.formats.detection import format_of
from tandem.api.formats.plain_tools import told_in_words

__all__ = ["format_of", "told_in_words"]
