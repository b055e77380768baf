"""What an op is, and where a call of it goes: as data, as text of 60 to 120 columns, as HTML.

`rules` reads a line for each rule off an op, `needs` what each feature has or lacks; `description` puts them together.
`route` follows a call from key to key, `explanation` says where it ends. `data` is plain data, `screen` lays text out,
`html` makes tables for notebooks. `methods` has what ops and registries get of it.
"""

from customops._describe.methods import Described as Described
from customops._describe.methods import Listed as Listed
