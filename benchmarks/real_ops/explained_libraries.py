LIBRARIES: list = []
