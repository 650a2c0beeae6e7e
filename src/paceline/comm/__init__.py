"""How ranks talk: one contract (:mod:`.base`) over several transports."""
