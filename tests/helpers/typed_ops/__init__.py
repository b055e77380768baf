"""Ops with every type that a signature can say, for tests/types: each is a row of the table in docs/types_table.md."""

from helpers.typed_ops.outputs import OUTPUTS
from helpers.typed_ops.records import RECORDS
from helpers.typed_ops.row import Row, define_all
from helpers.typed_ops.tensors import TENSORS
from helpers.typed_ops.values import VALUES
from helpers.typed_ops.writes import WRITES

#: The parts of the table.
PARTS = {"Parameters": [*VALUES, *RECORDS], "Parameters with tensors": TENSORS, "Returns": OUTPUTS, "Writes": WRITES}

ROWS: dict[str, Row] = {row.name: row for part in PARTS.values() for row in part}
OPS = define_all(ROWS)
