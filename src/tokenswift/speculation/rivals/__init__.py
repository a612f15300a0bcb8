"""Other people's methods, as they published them, to compare with. `speculation.methods` registers
them; nothing else imports from here."""
