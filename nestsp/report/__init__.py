"""What people read: banners, tables, trees."""
