"""Client of the order store, second generation. Amounts are in cents."""

from dataclasses import dataclass, field

import requests

BASE_URL = "http://orders.internal/v2"


class OrderNotFound(LookupError):
    pass


@dataclass
class Order:
    id: str
    state: str
    total_cents: int
    lines: list = field(default_factory=list)


def get_order(order_id: str) -> Order:
    answer = requests.get(f"{BASE_URL}/orders/{order_id}", timeout=5)
    if answer.status_code == 404:
        raise OrderNotFound(order_id)
    answer.raise_for_status()
    return Order(**answer.json())


def find_orders(text: str, limit: int) -> list[Order]:
    answer = requests.get(f"{BASE_URL}/search", params={"q": text, "limit": limit}, timeout=5)
    answer.raise_for_status()
    return [Order(**hit) for hit in answer.json()]


def update_address(order_id: str, address: dict) -> None:
    answer = requests.put(f"{BASE_URL}/orders/{order_id}/address", json=address, timeout=5)
    answer.raise_for_status()
