"""The parts in place: the controller and its plain classes, Ray actors, and the command line."""
