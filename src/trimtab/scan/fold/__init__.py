"""Jobs larger than memory: what is alike is replayed once.

Data parallel replicas do the same work and meet at few communications. Each replica's files are read once, by a worker,
and summed up (:mod:`.digest`); what its ranks share with other replicas stays as it is. Whole are only the replicas
that stand out, and some to compare them with (:mod:`.choose`); the others are replayed as stretches of time between the
communications that they share (:mod:`.mirror`).
"""
