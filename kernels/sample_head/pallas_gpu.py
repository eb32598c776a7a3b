def problem(hidden, weight, draws):
    return "not there yet"
