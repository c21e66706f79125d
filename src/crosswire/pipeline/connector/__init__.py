"""The `crosswire` data source: a running hub's messages in Spark, read and written."""
