"""The ledger of one customer."""

from dataclasses import dataclass


@dataclass
class Entry:
    order_id: str
    month: str


class Ledger:
    def __init__(self, rows: dict[str, list[Entry]]):
        self._rows = rows

    def entries(self, customer: str, month: str) -> list[Entry]:
        return [e for e in self._rows.get(customer, []) if e.month == month]
