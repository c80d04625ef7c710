"""Endpoints for refunds."""

from flask import Blueprint, abort, jsonify, request

from orders.clients import legacy_client
from orders.money import to_cents

blueprint = Blueprint("refunds", __name__)


@blueprint.post("/")
def create():
    body = request.get_json()
    order = legacy_client.fetch_order(body["order_id"])
    if order is None:
        abort(404)
    if to_cents(body["amount"]) > to_cents(order["total"]):
        abort(422)
    return jsonify({"order_id": order["id"], "state": "requested"}), 202
