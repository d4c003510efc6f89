"""The lightrft_multimodal room has the actors and trainers of LightRFT that see or hear."""
