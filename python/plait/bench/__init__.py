"""Measurements: `plait bench`. Each returns rows {case, metric, value, unit}."""


def row(case, metric, value, unit):
    """value None: there is none, and the metric says why."""
    value = None if value is None else round(float(value), 4)
    return {"case": case, "metric": metric, "value": value, "unit": unit}
