"""Ops with every type of a signature: a row of the table in docs/types_table.md each."""

from products.typed_ops.outputs import OUTPUTS
from products.typed_ops.records import RECORDS
from products.typed_ops.row import Row, define_all
from products.typed_ops.tensors import TENSORS
from products.typed_ops.values import VALUES
from products.typed_ops.writes import WRITES

#: The parts of the table.
PARTS = {"Parameters": [*VALUES, *RECORDS], "Parameters with tensors": TENSORS, "Returns": OUTPUTS, "Writes": WRITES}

ROWS: dict[str, Row] = {row.name: row for part in PARTS.values() for row in part}
OPS = define_all(ROWS)
