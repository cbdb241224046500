"""Write docs/conformance.md from results."""


def write(results, path):
    pass
