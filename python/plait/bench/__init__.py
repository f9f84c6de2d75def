"""Measurements: `plait bench`. Each returns rows {case, metric, value, unit}."""


def row(case, metric, value, unit):
    return {"case": case, "metric": metric, "value": round(float(value), 4), "unit": unit}
