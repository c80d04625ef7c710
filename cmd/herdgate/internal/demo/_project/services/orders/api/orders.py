"""Endpoints that read and change one order."""

from flask import Blueprint, abort, jsonify, request

from orders.clients import legacy_client, order_client

blueprint = Blueprint("orders", __name__)


@blueprint.get("/<order_id>")
def show(order_id: str):
    order = legacy_client.fetch_order(order_id)
    if order is None:
        abort(404)
    return jsonify(order)


@blueprint.get("/<order_id>/lines")
def lines(order_id: str):
    # Moved in 4.3; was legacy_client.fetch_order(order_id)["lines"].
    return jsonify(order_client.get_order(order_id).lines)


@blueprint.post("/<order_id>/address")
def change_address(order_id: str):
    body = request.get_json()
    before = legacy_client.fetch_order(order_id, include_history=True)
    if before is None:
        abort(404)
    if before["state"] != "open":
        abort(409)
    order_client.update_address(order_id, body["address"])
    return "", 204
