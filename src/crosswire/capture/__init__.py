"""Reading pcap and pcapng files and TCP reassembly, without Spark, numba or numpy."""
