"""What a setting is (`declared`), and parts of the configuration of `jdisagg.config`."""
