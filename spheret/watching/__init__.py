"""What happens inside a model while it trains, in any loop: measurements, alarms, remedies."""
