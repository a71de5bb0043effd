"""What results say: statistics, doubts, comparisons, tables and charts."""
