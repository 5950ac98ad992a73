"""Structs of the parts of frame bodies, which `bodies.py` writes and `body_reader.py` reads.

Tests: tests/contract/test_frames_golden.py.
"""

from __future__ import annotations

import struct

U16, U32, U64 = (struct.Struct(f"<{code}") for code in "HIQ")
TWO_U64 = struct.Struct("<QQ")
COUNTS = struct.Struct("<III")
ERROR = struct.Struct("<QBI")
ID_AND_CLAIM = struct.Struct("<QQQIB")
RUN = struct.Struct("<II")
PULL_RUN = struct.Struct("<III")
PART = struct.Struct("<II")
LAYOUT = struct.Struct("<IIII")
QUERY = struct.Struct("<QHIH")
OFFER = struct.Struct("<QHBI")
SEGMENT = struct.Struct("<QH")
TERMS = struct.Struct("<BQ")
