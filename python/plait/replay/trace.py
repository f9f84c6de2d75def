"""Reads serving traces as published: Mooncake JSONL and Azure CSV, told apart by content."""

import csv
import json
from dataclasses import dataclass
from datetime import datetime
from fractions import Fraction
from math import ceil, isfinite

MOONCAKE_BLOCK = 512  # tokens that one entry of hash_ids stands for


@dataclass(frozen=True)
class TraceRequest:
    """One request of a trace, its lengths scaled."""

    arrival_ms: float
    input_len: int
    output_len: int
    hash_ids: tuple = ()  # one a block of the input; an equal id: an equal block and all before it
    block_tokens: int = 0  # tokens a block; 0: no blocks are known


def read_trace(path, scale="1", limit=None):
    """The requests of a trace by arrival time, at most `limit`.

    scale ("1/32", "0.5") multiplies lengths, rounding up, and the 512-token blocks alike; a block
    must stay a whole number of tokens. Raises ValueError naming file and line for what is neither
    Mooncake JSONL nor Azure CSV, and for a trace without requests.
    """
    try:
        scale = Fraction(str(scale))
    except (ValueError, ZeroDivisionError):
        raise ValueError(f"scale is {scale!r}; taken is a number such as 1/32 or 0.5") from None
    if limit is not None and limit < 1:
        raise ValueError(f"limit is {limit} requests; it must be at least 1")
    if scale <= 0 or (scale * MOONCAKE_BLOCK).denominator != 1:
        raise ValueError(
            f"scale is {scale}; 512 * scale must be a whole number of tokens, at least 1"
        )
    with open(path, newline="") as file:
        start = file.read(1)
        file.seek(0)
        read = _read_mooncake if start == "{" else _read_azure
        requests = []
        for request in read(file, str(path), scale):
            requests.append(request)
            if limit is not None and len(requests) >= limit:
                break
    if not requests:
        raise ValueError(f"{path}: the trace has no requests")
    return sorted(requests, key=lambda request: request.arrival_ms)


def _scaled(tokens, scale, where):
    number = type(tokens) in (int, float) and isfinite(tokens)
    if not number or int(tokens) != tokens or not 0 <= tokens < 2**31:
        raise ValueError(f"{where}: a length is {tokens!r}; it must be 0 ... 2^31 - 1")
    return ceil(int(tokens) * scale)


def _read_mooncake(file, path, scale):
    block_tokens = int(MOONCAKE_BLOCK * scale)
    for number, line in enumerate(file, 1):
        where = f"{path}:{number}"
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            arrival, inputs, outputs = row["timestamp"], row["input_length"], row["output_length"]
            hash_ids = tuple(row.get("hash_ids", ()))
            if type(arrival) not in (int, float) or not isfinite(arrival):
                raise ValueError(f"timestamp is {arrival!r}, no number")
            if not all(type(id_) is int for id_ in hash_ids):
                raise ValueError("hash_ids are no integers")
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{where}: not a Mooncake request ({error!r}); wanted are timestamp, "
                f"input_length, output_length, hash_ids"
            ) from None
        input_len = max(_scaled(inputs, scale, where), 1)
        if hash_ids and len(hash_ids) != ceil(input_len / block_tokens):
            raise ValueError(
                f"{where}: {len(hash_ids)} hash_ids for {inputs} tokens; one a block of "
                f"{MOONCAKE_BLOCK} is {ceil(input_len / block_tokens)}"
            )
        yield TraceRequest(
            float(arrival),
            input_len,
            max(_scaled(outputs, scale, where), 1),
            hash_ids,
            block_tokens if hash_ids else 0,
        )


def _read_azure(file, path, scale):
    rows = csv.reader(file)
    header = next(rows, [])
    columns = ["TIMESTAMP", "ContextTokens", "GeneratedTokens"]
    if header[:3] != columns:
        raise ValueError(
            f"{path}:1: neither Mooncake JSONL (a line starts with '{{') nor Azure CSV "
            f"(the header is {','.join(columns)}); found {','.join(header)[:60]!r}"
        )
    first = None
    for number, row in enumerate(rows, 2):
        where = f"{path}:{number}"
        try:
            arrival = datetime.fromisoformat(row[0][:26]).replace(tzinfo=None)
            inputs, outputs = int(row[1]), int(row[2])
        except (ValueError, IndexError):
            raise ValueError(f"{where}: not an Azure request: {','.join(row)[:60]!r}") from None
        first = first or arrival
        yield TraceRequest(
            (arrival - first).total_seconds() * 1e3,
            max(_scaled(inputs, scale, where), 1),
            max(_scaled(outputs, scale, where), 1),
        )
