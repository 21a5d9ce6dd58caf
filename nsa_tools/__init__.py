"""Tools around nsa_layer: commands, the demo, measurements, oracles and helpers of tests."""
