"""Operators as libraries and tutorials write them; importing this adds each of them to `PROGRAMS`."""

from helpers.drop_in import libraries as libraries
from helpers.drop_in import tutorials as tutorials
