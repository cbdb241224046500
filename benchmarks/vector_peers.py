def installed():
    return {}
