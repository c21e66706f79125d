"""From captured bytes to tables, on Spark. The only place that knows pyspark."""
