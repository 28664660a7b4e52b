"""What Airflow loads by itself: each file of this folder."""
