"""Weight sync: a trainer publishes a version of the weights, a transport carries it, and engines receive it."""
