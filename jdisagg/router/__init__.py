"""The router's decisions: functions without side effects that choose the workers of each request
from a snapshot of the cluster."""
